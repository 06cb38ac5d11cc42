"""Layout-aware functions that models call."""
