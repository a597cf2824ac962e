"""SkyRL's options as values of the algebra, and the configuration objects that its functions read."""

from types import SimpleNamespace
from typing import Any, NamedTuple

from tracegrad.objective import Aggregation, Ratio, Reduce, Rejection, Truncate, Weight

OLD, MISMATCH, DIRECT = Ratio("theta", "old"), Ratio("old", "rollout"), Ratio("theta", "rollout")
MEAN, PRODUCT = Aggregation("trace", "mean"), Aggregation("trace", "sum")
OFF = {
    "tis_ratio_type": None,
    "token_tis_ratio_clip_high": 2.0,
    "sequence_tis_ratio_clip_high": 1.2,
    "sequence_mask_metric": None,
    "geo_mask_high": 1.1,
    "geo_mask_low": 0.95,
    "product_mask_high": 2.0,
    "product_mask_low": 0.5,
    "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
}


class Correction(NamedTuple):
    """One combination of the options of off_policy_correction."""

    tis: str | None = None
    mask: str | None = None
    low: float | None = None
    high: float | None = None
    tokens: bool = False

    def __str__(self) -> str:
        told = [f"TIS {self.tis}", f"mask {self.mask}", f"outlier {self.low} {self.high}", f"tokens {self.tokens}"]
        return ", ".join(part for part in told if "None" not in part or "outlier" in part)

    @property
    def options(self) -> SimpleNamespace:
        """SkyRL's."""
        tokens = {"token_mask_is_threshold_low": 0.6, "token_mask_is_threshold_high": 1.6} if self.tokens else {}
        chosen = {
            "tis_ratio_type": self.tis,
            "sequence_mask_metric": self.mask,
            "outlier_token_is_threshold_low": self.low,
            "outlier_token_is_threshold_high": self.high,
        }
        return SimpleNamespace(**(OFF | chosen | tokens))

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """Ours, in SkyRL's order: outliers, tokens, then the row, of what those have left."""
        gates = []
        if self.low or self.high:
            gates.append(Rejection(MISMATCH, low=self.low, high=self.high, drops="trace"))
        if self.tokens:
            gates.append(Rejection(MISMATCH, low=0.6, high=1.6))
        if self.mask == "geometric":
            gates.append(Rejection(MISMATCH, level=MEAN, low=0.95, high=1.1, terms="kept"))
        if self.mask == "product":
            gates.append(Rejection(MISMATCH, level=PRODUCT, low=0.5, high=2.0, terms="kept"))
        return tuple(gates)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Ours."""
        sequence = Weight(MISMATCH, Aggregation("trace", "sum", terms="kept"), Truncate(0.0, 1.2))
        return {None: (), "token": (Weight(MISMATCH, transform=Truncate(0.0, 2.0)),), "sequence": (sequence,)}[self.tis]


REDUCTIONS = {
    "token_mean": Reduce("token"),
    "token_mean_legacy": Reduce("token"),
    "sequence_mean": Reduce("trace", "mean"),
    "seq_mean_token_sum_norm": Reduce("trace", "sum", norm=40.0),
    "prompt_mean": Reduce("prompt", "mean"),
}


def algorithm(loss: str, correction: Correction | None = None, **options: Any) -> SimpleNamespace:
    """SkyRL's AlgorithmConfig, as far as its losses read it."""
    return SimpleNamespace(
        policy_loss_type=loss,
        loss_reduction="sequence_mean",
        eps_clip_low=0.2,
        eps_clip_high=0.28,
        clip_ratio_c=3.0,
        sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
        cispo=SimpleNamespace(cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0),
        dppo=SimpleNamespace(dppo_type=options.get("dppo", "binary_tv"), delta_low=0.2, delta_high=0.25),
        clip_cov=SimpleNamespace(clip_ratio=0.1, clip_cov_lb=1e-3, clip_cov_ub=0.03),
        kl_cov=SimpleNamespace(kl_cov_frac=0.2, ppo_kl_coef=1.0),
        off_policy_correction=(correction or Correction()).options,
    )
