"""Receive OpenTelemetry traces from running agents, or pull them from a trace store, into a folder.

`server` is an OTLP/HTTP endpoint, `otlp` decodes its requests, and `folder` stores spans and writes whole traces as
lines that `tracegrad.read` reads. Works without torch. Needs `pip install 'tracegrad[receive]'`.
"""
