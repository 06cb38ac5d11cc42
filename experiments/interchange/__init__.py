"""Interchange: weights under the names of Hugging Face's transformers, and back."""
