"""Sagas told to people, in words and as plain data: the same ones for the command line, the API and the tab."""
