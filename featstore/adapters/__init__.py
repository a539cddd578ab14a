"""Adapters to other frameworks, one package each. Only a framework's own package imports the framework, on request."""
