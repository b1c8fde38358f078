"""Reports: data model and renderers (text, JSON, Markdown, HTML)."""
