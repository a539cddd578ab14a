"""Choices of the library by itself, beside the best choice by hand."""
