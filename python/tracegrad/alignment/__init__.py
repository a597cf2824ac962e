"""Align recorded traces with a tokenizer: each token gets one source, and mismatches are reported."""
