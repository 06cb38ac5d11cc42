"""Generation and scoring: weights of runs or of transformers, files of prompts."""
