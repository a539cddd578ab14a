"""Command line: ``featstore create | info | verify | plan | pack | train | bench``, one file a command."""
