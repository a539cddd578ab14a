"""What the library chooses by itself, beside the best choice by hand."""
