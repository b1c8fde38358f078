"""Command line: click commands that parse, call te_convert.api and render; no logic."""
