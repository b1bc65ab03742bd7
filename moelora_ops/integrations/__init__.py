"""Adapters inside other libraries' models. Importing a module here imports nothing of theirs: that happens on use."""
