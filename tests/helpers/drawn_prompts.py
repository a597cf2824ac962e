"""Prompts of drawn ids, asked of every server as completions of eight tokens."""

import random

from tracegrad.weight_sync import probe_requests


def drawn(ids, seed, length=192):
    """Ids out of `ids`, others for each seed."""
    return random.Random(seed).choices(list(ids), k=length)


async def ask(servers, *prompts, salt=None, **told):
    """What each server samples after each prompt; `number` is the prompt's."""
    probes = [
        probe_requests.Probe(probe_requests.COMPLETIONS, {"prompt": ids, "max_tokens": 8, **told}) for ids in prompts
    ]
    return [
        await probe_requests.send_probe(servers, url, probe, number, salt)
        for url in servers.ready
        for number, probe in enumerate(probes)
    ]
