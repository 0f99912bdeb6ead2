"""How much arithmetic a training run is, and how long one device would need for it."""

from __future__ import annotations


def training_flops(parameters: float, samples: float) -> float:
    """Floating-point operations to train on `samples`: 6 · N · D.

    N is the number of parameters, D that of samples: images for a network of dense layers, tokens for a language
    model. A parameter takes part in one multiplication and one addition in the forward pass, and in twice as many
    in the backward pass (one gradient for the parameter, one for its input). Attention's own products, a few per
    cent in a large model, are left out.

    Source: Kaplan et al. (2020), "Scaling laws for neural language models", section 2.1; used in the same form by
    Hoffmann et al. (2022), "Training compute-optimal large language models".
    """
    return 6 * parameters * samples
