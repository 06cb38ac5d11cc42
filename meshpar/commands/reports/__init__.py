"""Reports: what the commands print, draw and write for people."""
