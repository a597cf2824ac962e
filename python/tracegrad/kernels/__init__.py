"""Arithmetic behind `policy`, one file per operation; imported on use, with torch. No models, no batches."""
