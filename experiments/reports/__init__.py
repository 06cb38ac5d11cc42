"""Reports of the commands: texts, tables, pictures and pages."""
