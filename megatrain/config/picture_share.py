"""Which samples of a run have pictures, by the weights of the sources: some sources have pictures, others text only."""

from __future__ import annotations

from megatrain.config.config import Config


def mixes_pictures(config: Config) -> bool:
    """Return whether some samples of the run may have a picture, and others none."""
    return len({source.has_pictures for source in config.data_sources.values()}) > 1


def picture_share(config: Config, sample: int = 0) -> float:
    """Return the share of the samples with pictures in the stage of sample number `sample`.

    If the configuration names no source, all samples of a model with pictures have a picture.
    """
    sources = config.data_sources.values()
    if not sources:
        return float(config.model.has_pictures)
    weight_of = {source.resolved_name: source.weight for source in sources}
    for placed in config.placed_stages:
        if placed.first_sample <= sample and placed.stage.weights:
            weight_of = dict(placed.stage.weight_of)
    with_pictures = (weight_of.get(source.resolved_name, 0.0) for source in sources if source.has_pictures)
    return sum(with_pictures) / sum(weight_of.values())
