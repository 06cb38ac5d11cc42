"""Reports: tables, pictures and pages that the commands make for people."""
