"""Methods of single papers. Nothing else in the library imports them."""
