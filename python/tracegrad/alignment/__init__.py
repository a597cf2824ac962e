"""Align recorded traces with a tokenizer: every token gets one source, and what does not fit is reported."""
