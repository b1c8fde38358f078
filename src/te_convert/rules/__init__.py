"""One rule per file: guards, spec and weight map; stateless, returns values."""
