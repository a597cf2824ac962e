"""Checks of logprobs as numbers, batch by batch: missing, filled up, of another distribution, contradicted by a sum."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.codes import LOGPROB_KINDS, TEXT_TRAINS
from tracegrad.doctor import tops
from tracegrad.doctor.finding import Hits, check
from tracegrad.doctor.look import Look
from tracegrad.sampling import TRUNCATING, options

FILLED_TURN = 8  # tokens of one value from which a whole turn counts as filled
FILLED_TAIL = 4  # zeros at the end of a turn that has other values before


@check(
    "turns without logprobs",
    costs=0.0,
    wrong=1.0,
    hurts="Without the sampling logprob there is no ratio: the turn can only be imitated, not corrected.",
    cure=f"Record with logprobs=true (and return_token_ids on vLLM). Text alone trains with {TEXT_TRAINS}.",
    hides=("missing_logprobs", "drift"),
)
def no_logprobs(look: Look) -> Hits:
    """Sees turns that list no logprob at all.

    Threshold: any turn costs it; wrong where no turn has one.
    """
    none = (look["logprobs"] <= 0) | ((look["missing"] > 0) & (look["missing"] == look["logprobs"]))
    return look.hits(none, None, lambda g: "the record has no logprobs")


@check(
    "logprobs that are null, NaN or -inf",
    costs=0.0,
    hurts="These tokens are masked, and a trace's ratio lacks their factor.",
    cure="Ask the server for the sampled token's logprob (logprobs=true, top_logprobs=0 is enough); do not fill gaps.",
)
def missing_logprobs(look: Look) -> Hits:
    """Sees turns of which some logprobs are missing and others are there (R23).

    Threshold: any turn; what is missing is NaN and masked, never taken as 0.
    """
    some = (look["missing"] > 0) & (look["missing"] < look["logprobs"])
    return look.hits(some, None, lambda g: f"{look['missing'][g]} of {look['logprobs'][g]} are missing")


@check(
    "logprobs that no probability has",
    costs=0.0,
    wrong=0.01,
    hurts="A positive number is a probability, a loss or a sum, and -9999.0 a server's sentinel. They are masked, but "
    "where some are of the wrong kind the others may be too.",
    cure="Record log-probabilities in nats as the server gave them: log(p) for linear ones, not -log(p).",
)
def impossible_logprobs(look: Look) -> Hits:
    """Sees turns with a positive logprob (above 0.001) or exactly -9999.0 (R24).

    Threshold: any turn; wrong from 1 % of turns, where it is a kind of number and no accident.
    """
    return look.hits(look["invalid"] > 0, None, lambda g: f"{look['invalid'][g]} of {look['logprobs'][g]}")


@check(
    "more or fewer logprobs than tokens",
    costs=0.0,
    wrong=0.01,
    hurts="Which logprob belongs to which token cannot be known. These turns are masked whole; a zip of the two lists "
    "would shift every ratio.",
    cure="Keep ids and logprobs of one response together; cut both (stop strings, padding) or none.",
)
def count_mismatch(look: Look) -> Hits:
    """Sees turns whose list of logprobs is longer or shorter than that of their tokens (R22).

    Threshold: any turn; wrong from 1 % of turns, as the recorder then pairs lists that do not belong together.
    """
    return look.drift_hits(22)


@check(
    "logprobs filled up with one value",
    costs=0.0,
    wrong=0.01,
    hurts="A logprob of 0 says probability 1: the ratio becomes the policy's own probability, far from 1, and unlike a "
    "missing one it is not masked.",
    cure="Write null where the server gave no logprob. Missing ones are masked, made-up ones are trained on.",
    hides=("made_up_zeros",),
)
def filled_logprobs(look: Look) -> Hits:
    """Sees turns of at least 8 tokens with one value throughout, or that end in 4 or more exact zeros.

    Threshold: 8 equal, 4 zeros at the end while under 5 % of the batch's other logprobs are 0: a confident model
    rounds single tokens to 0.0, so zeros alone prove nothing. Greedy turns (temperature 0) are not looked at. Wrong
    from 1 % of turns.
    """
    whole, tail, least = fillings(look)
    return look.hits(
        whole | tail,
        None,
        lambda g: f"all {look['logprobs'][g]} logprobs are {least[g]:g}" if whole[g] else "the turn ends in zeros",
    )


def fillings(look: Look) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[Any]]:
    """[G] bools: one value throughout; zeros at the end; and [G] the least value, 0 where a turn has none."""
    cu, flat = look.cu_logprobs, look["flat_logprobs"]
    count = np.diff(cu)
    least, most = np.zeros(look.generations), np.full(look.generations, -1.0)
    full = np.flatnonzero(count)
    if len(full):
        least[full], most[full] = (each.reduceat(flat, cu[:-1][full]) for each in (np.minimum, np.maximum))
    turn = np.repeat(np.arange(look.generations), count)
    solid = np.full(look.generations, -1, np.int64)  # the last token of each turn that is not exactly 0
    other = np.flatnonzero(flat != 0)
    solid[turn[other]] = other
    zeros = np.where(solid >= 0, cu[1:] - 1 - solid, 0)
    greedy = look["temperature"] == 0
    whole = (count >= FILLED_TURN) & (least == most) & ~greedy
    tail = (zeros >= FILLED_TAIL) & ~greedy
    inside = np.sum(flat == 0) - int(zeros.sum()) - int(count[whole & (least == 0)].sum())
    return whole, tail & (inside < 0.05 * max(len(flat), 1)), least


@check(
    "raw logprobs, or of an unknown kind, at a temperature other than 1; or greedy decoding",
    costs=0.0,
    wrong=0.01,
    hurts="The tokens were drawn from the tempered distribution, raw logprobs are of the untempered one: the ratio "
    "corrects for a policy that did not sample them. Greedy decoding draws from no distribution.",
    cure="If the numbers are processed already and top_p, top_k, min_p and penalties were off, say --logprob-kind "
    "processed. Else serve with --logprobs-mode processed_logprobs, sample with these off, and record logprob_kind "
    "'processed'; or sample at temperature 1. Processed logprobs cure the temperature alone: under top_p or top_k "
    "their ratio is the kept mass. What is recorded trains without a ratio: --objective TOPR_POSITIVE --text-only.",
)
def raw_at_temperature(look: Look) -> Hits:
    """Sees turns at a temperature other than 1 whose logprobs are raw or of no known kind, or at one below 0.01.

    Threshold: any difference from 1; wrong from 1 % of turns.
    """
    kinds = ("of an unknown kind", "raw", "processed")
    hit = np.array(["temperature" in look.mismatch.get(g, ()) for g in range(look.generations)], bool)
    return look.hits(
        hit,
        None,
        lambda g: f"temperature {look.mismatch[g]['temperature']}, logprobs {kinds[look['logprob_kind'][g]]}",
    )


@check(
    "tokens cut off, penalised or forced when they were sampled",
    costs=0.0,
    wrong=0.01,
    hurts="top_p, top_k, min_p, penalties, logit_bias, beam search, grammars and the like change the distribution that "
    "the tokens were drawn from; the trainer computes the whole one. Where a cut keeps the mass S of it, the ratio to "
    "processed logprobs is S at each token although nothing changed, and that to raw ones is 1 instead of S.",
    cure="Sample without them: they are off by default, but for those in the model's generation_config.json, which "
    "vLLM leaves out with --generation-config vllm. What is recorded trains without a ratio: --objective TOPR_POSITIVE "
    "--text-only. --rescore measures S; --accept-truncated-sampling of train takes the ratio as it is.",
)
def reshaped_sampling(look: Look) -> Hits:
    """Sees turns whose request names an option that cuts off, penalises, favours or forces tokens.

    Threshold: any value other than the one at which the option does nothing; wrong from 1 % of turns.
    """
    found = {
        g: {name: value for name, value in told.items() if name != "temperature"} for g, told in look.mismatch.items()
    }
    hit = np.array([bool(found.get(g)) for g in range(look.generations)], bool)
    kinds = ("of an unknown kind", "raw", "processed")
    return look.hits(
        hit, None, lambda g: f"{options(found[g])}, logprobs {kinds[look['logprob_kind'][g]]}{_kept(look, g, found[g])}"
    )


def _kept(look: Look, generation: int, told: dict[str, Any]) -> str:
    """The kept mass S of a turn whose tokens were cut off, by its alternatives where these say it; else ""."""
    if told.keys().isdisjoint(TRUNCATING):
        return ""
    raw = look["logprob_kind"][generation] != LOGPROB_KINDS.index("processed") and look["temperature"][generation] == 1
    record = look.traces.core.record(int(look.trace[generation]))
    mass = tops.kept_mass(record, told) if raw and told.keys() <= {"top_p", "top_k", "min_p"} else None
    if mass is None:
        return "; the kept mass S is not measured"
    return f"; kept mass S {mass[0]:.3f} on average, {mass[1]:.3f} at least, by the top_logprobs of its record"


@check(
    "requests that leave out what the model's generation_config.json sets",
    costs=0.0,
    hurts="A vLLM that was started in the ordinary way (--generation-config auto) takes what a request leaves out from "
    "this file, so that the tokens may be drawn at another temperature or with a cut than the record says. Nothing in "
    "the record shows it.",
    cure="Look how the server was started, then say it: --sampling-defaults model if it took the file, neutral if it "
    "did not (--generation-config vllm, or another server). Next time send every sampling option with each request.",
)
def server_defaults(look: Look) -> Hits:
    """Sees requests with logprobs that leave out a temperature, top_p, top_k, min_p or penalty which the
    generation_config.json beside the tokenizer sets to something that is not neutral; nothing with --sampling-defaults.

    Threshold: any turn costs; never wrong, as the file does not say how the server was started.
    """
    left = {} if look.sampling_defaults else look.left_out
    hit = np.array([g in left for g in range(look.generations)], bool)
    return look.hits(hit, None, lambda g: options({name: look.defaults[name] for name in left[g]}))


@check(
    "logprobs that do not add up to the recorded sum",
    costs=0.0,
    wrong=0.01,
    hurts="The server's own checksum says that a logprob was lost, added or changed after it was given.",
    cure="Find the step between server and file that edits the list; a list shifted by one loses one of them.",
)
def wrong_sum(look: Look) -> Hits:
    """Sees turns whose logprobs are all there and sum to something else than cumulative_logprob.

    Threshold: 0.01 nats and 0.1 %: rounding to three decimals stays below it over hundreds of tokens, a single lost
    logprob rarely does. Wrong from 1 % of turns.
    """
    flat = np.nan_to_num(look["flat_logprobs"].astype(np.float64))
    turn = np.repeat(np.arange(look.generations), np.diff(look.cu_logprobs))
    total = np.bincount(turn, flat, minlength=look.generations)
    told = look["cumulative_logprob"]
    whole = ~np.isnan(told) & (look["logprobs"] > 0) & (look["missing"] + look["invalid"] == 0)
    gap = np.abs(total - told)
    hit = whole & (gap > 0.01) & (gap > 1e-3 * np.abs(told))
    return look.hits(hit, whole, lambda g: f"they sum to {total[g]:.4f}, cumulative_logprob is {told[g]:.4f}")
