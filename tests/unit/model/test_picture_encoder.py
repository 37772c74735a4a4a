"""The model with pictures: its encoder against transformers' ViT, and the whole against a forward written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.config.model import ModelConfig
from megatrain.config.model_size import num_parameters, parameter_sizes
from megatrain.config.pictures import encoder_of
from megatrain.model import ModelPart, PatchRows, TokenContext, Transformer, initialize_
from tests.helpers.drawn_parameters import draw_parameters

B, S, P = 2, 12, 4
SIZES: dict[str, Any] = {
    "vocab_size": 30, "seq_len": S, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "vocab_multiple": 4,
    "picture_size": 6, "patch_size": 3, "encoder_hidden_size": 12, "encoder_num_layers": 3, "encoder_num_heads": 2,
    "encoder_ffn_size": 20,
}  # fmt: skip


def build(**changes: Any) -> Transformer:
    model = Transformer(ModelConfig(**(SIZES | changes))).double()
    draw_parameters(model, 0.4)
    return model


def drawn_inputs() -> tuple[Tensor, Tensor, TokenContext]:
    """Return tokens, labels, which the patches have not, and the context with random patches."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 30, (S + 1, B), generator=generator)
    labels = tokens[1:].clone()
    labels[:P] = -100
    patches = torch.randint(0, 256, (P, B, 27), generator=generator, dtype=torch.uint8)
    return tokens[:-1], labels, TokenContext(torch.arange(B), S, pictures=PatchRows.of_all(patches))


def as_transformers_vit(model: Transformer) -> Any:
    """Return transformers' ViT with the weights of the encoder; its first token, of the class, is left out."""
    transformers = pytest.importorskip("transformers")
    encoder, ours = encoder_of(model.config), model.encoder
    assert ours is not None
    vit = transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(
            hidden_size=encoder.hidden_size,
            intermediate_size=encoder.resolved_ffn_size,
            num_hidden_layers=encoder.num_layers,
            num_attention_heads=encoder.num_heads,
            image_size=6,
            patch_size=3,
            layer_norm_eps=encoder.norm_eps,
            hidden_act="gelu_pytorch_tanh",
            vision_use_head=False,
            attn_implementation="sdpa",
        )
    ).double()
    weights = dict(ours.named_parameters())
    # transformers' patch is [color, row, column], ours [row, column, color]
    found = {
        "embeddings.patch_embedding.weight": weights["patch.weight"].unflatten(1, (3, 3, 3)).permute(0, 3, 1, 2),
        "embeddings.patch_embedding.bias": weights["patch.bias"],
        "embeddings.position_embedding.weight": weights["position"],
        "post_layernorm.weight": weights["norm.weight"],
        "post_layernorm.bias": weights["norm.bias"],
    }
    for layer in range(encoder.num_layers):
        block, theirs = f"blocks.{layer}", f"encoder.layers.{layer}"
        qkv = weights[f"{block}.attention_branch.attention.qkv.weight"]
        bias = weights[f"{block}.attention_branch.attention.qkv.bias"]
        for row, name in enumerate(("q_proj", "k_proj", "v_proj")):
            found[f"{theirs}.self_attn.{name}.weight"] = qkv[:, row].flatten(0, 1)
            found[f"{theirs}.self_attn.{name}.bias"] = bias[:, row].flatten()
        found[f"{theirs}.self_attn.out_proj.weight"] = weights[f"{block}.attention_branch.attention.out.weight"]
        found[f"{theirs}.self_attn.out_proj.bias"] = weights[f"{block}.attention_branch.attention_bias"]
        found[f"{theirs}.mlp.fc1.weight"] = weights[f"{block}.mlp_branch.mlp.up.weight"][0]
        found[f"{theirs}.mlp.fc1.bias"] = weights[f"{block}.mlp_branch.mlp.up.bias"][0]
        found[f"{theirs}.mlp.fc2.weight"] = weights[f"{block}.mlp_branch.mlp.down.weight"]
        found[f"{theirs}.mlp.fc2.bias"] = weights[f"{block}.mlp_branch.mlp_bias"]
        for number, branch in enumerate(("attention_branch", "mlp_branch"), 1):
            for leaf in ("weight", "bias"):
                found[f"{theirs}.layer_norm{number}.{leaf}"] = weights[f"{block}.{branch}.norm.{leaf}"]
    prefix = "vision_model." if any(name.startswith("vision_model.") for name in vit.state_dict()) else ""
    vit.load_state_dict({f"{prefix}{name}": value for name, value in found.items()}, strict=True)
    return vit


def pixels_of(patches_PKC: Tensor) -> Tensor:
    """Return the pictures of these patches from -1 to 1, [B, 3, 6, 6]."""
    rows = patches_PKC.double().permute(1, 0, 2).reshape(B, 2, 2, 3, 3, 3)  # patch row and column, row, column, color
    return rows.permute(0, 5, 1, 3, 2, 4).reshape(B, 3, 6, 6) / 127.5 - 1.0


def test_encoder_computes_what_transformers_computes() -> None:
    model = build()
    _, _, context = drawn_inputs()
    assert model.encoder is not None
    assert context.pictures is not None

    with torch.no_grad():
        found = model.encoder(context.pictures, context.sample_B).transpose(0, 1)
        expected = as_transformers_vit(model)(pixels_of(context.pictures.patches_PKC)).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def plain_loss(
    model: Transformer, encoded_PBE: Tensor, tokens: Tensor, labels: Tensor, context: TokenContext
) -> Tensor:
    """Return the loss with projector and embedding written out, by a decoder without pictures."""
    weights = dict(model.named_parameters())
    hidden = functional.gelu(encoded_PBE @ weights["projector.up.weight"][0].T + weights["projector.up.bias"][0],
                             approximate="tanh")  # fmt: skip
    patches = hidden @ weights["projector.down.weight"].T + weights["projector.bias"]
    words = weights["embedding.word.weight"][tokens[P:]] * model.config.hidden_size**0.5
    x = torch.cat([patches, words]) + weights["embedding.position"][:, None]
    decoder = replace(model.config, picture_size=0)
    alone = Transformer(decoder, ModelPart(range(decoder.num_layers), has_embedding=False, has_head=True)).double()
    alone.blocks, alone.loss_head = model.blocks, model.loss_head
    loss: Tensor = alone(x, TokenContext(context.sample_B, S), labels)
    return loss


def test_loss_and_gradients_are_those_of_a_plain_forward() -> None:
    model = build(has_scaled_embedding=True)
    tokens, labels, context = drawn_inputs()
    assert model.encoder is not None
    assert context.pictures is not None

    found = model(tokens, context, labels)
    gradients = torch.autograd.grad(found, list(model.parameters()))
    vit = as_transformers_vit(model)
    encoded = vit(pixels_of(context.pictures.patches_PKC)).last_hidden_state.transpose(0, 1)
    expected = plain_loss(model, encoded, tokens, labels, context)
    names = [name for name, _ in model.named_parameters() if not name.startswith("encoder.")]
    position = next(
        parameter for name, parameter in vit.named_parameters() if name.endswith("position_embedding.weight")
    )
    *plain, of_positions = torch.autograd.grad(expected, [*map(model.get_parameter, names), position])

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    by_name = dict(zip((name for name, _ in model.named_parameters()), gradients, strict=True))
    for name, gradient in zip(names, plain, strict=True):
        torch.testing.assert_close(by_name[name], gradient, rtol=1e-10, atol=1e-12, msg=name)
    torch.testing.assert_close(by_name["encoder.position"], of_positions, rtol=1e-10, atol=1e-12)


def test_text_sees_the_picture_and_patches_see_no_text() -> None:
    model = build()
    tokens, _, context = drawn_inputs()
    assert context.pictures is not None
    other = context.pictures.patches_PKC.clone()
    other[P - 1, 0] += 1
    changed = TokenContext(context.sample_B, S, pictures=PatchRows.of_all(other))
    with torch.no_grad():
        before, after = model.hidden(tokens, context), model.hidden(tokens, changed)
        with_other_text = model.hidden((tokens + 1) % 30, context)

    # the encoder attends in both directions, so that the first patch depends on the last one
    assert (before[:, 0] != after[:, 0]).any(-1).all()
    assert torch.equal(before[:, 1], after[:, 1])
    assert torch.equal(before[:P], with_other_text[:P])


@pytest.mark.parametrize("place", [0, 1])
def test_pictures_and_text_share_a_micro_batch(place: int) -> None:
    """The loss and the gradients are the sums of those of each sample alone, of which one has a picture."""
    model = build(has_scaled_embedding=True)
    tokens, labels, context = drawn_inputs()
    labels[:P, 1 - place] = 3
    assert context.pictures is not None
    patches_P1C = context.pictures.patches_PKC[:, place, None]
    pictures = PatchRows(patches_P1C, torch.tensor([place]))
    parameters = list(model.parameters())

    found = model(tokens, TokenContext(context.sample_B, S, pictures=pictures), labels)
    gradients = torch.autograd.grad(found, parameters)
    columns = [(tokens[:, [one]], labels[:, [one]]) for one in (place, 1 - place)]
    pictured = TokenContext(torch.tensor([place]), S, pictures=PatchRows.of_all(patches_P1C))
    losses = [model(columns[0][0], pictured, columns[0][1])]
    plain = Transformer(replace(model.config, picture_size=0)).double()
    plain.embedding, plain.blocks, plain.loss_head = model.embedding, model.blocks, model.loss_head
    losses.append(plain(columns[1][0], TokenContext(torch.tensor([1 - place]), S), columns[1][1]))
    expected = torch.autograd.grad(losses[0] + losses[1], parameters)

    torch.testing.assert_close(found, losses[0] + losses[1], rtol=1e-12, atol=1e-12)
    for (name, _), one, other in zip(model.named_parameters(), gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=name)


def test_micro_batch_without_pictures_runs_no_encoder() -> None:
    model = build()
    tokens, labels, context = drawn_inputs()
    loss = model(tokens, TokenContext(context.sample_B, S), labels)
    loss.backward()

    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {
        name for name, _ in model.named_parameters() if not name.startswith(("encoder.", "projector."))
    }


def test_picture_parameters_have_names_sizes_and_values() -> None:
    config = ModelConfig(**SIZES, norm="rmsnorm_zero_centered")
    shapes = {name: parameter.shape for name, parameter in Transformer(config).named_parameters()}
    drawn = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in shapes.items()}
    for name, values in drawn.items():
        initialize_(values, name, config, 1, values.shape, (0,) * values.dim())

    assert {name: shape.numel() for name, shape in shapes.items()} == parameter_sizes(config)
    assert num_parameters(config) == sum(parameter_sizes(config).values())
    # norms of the encoder begin at 1 whatever the decoder's are, and its outputs are scaled by its own depth
    assert (drawn["encoder.norm.weight"] == 1).all()
    assert (drawn["loss_head.norm.weight"] == 0).all()
    out = drawn["encoder.blocks.0.attention_branch.attention.out.weight"]
    assert out.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.4)
    assert all(values.isfinite().all() for values in drawn.values())


def test_context_copies_its_pictures() -> None:
    """A captured graph reads a micro-batch from fixed memory, into which each further one is copied."""
    _, _, context = drawn_inputs()
    assert context.pictures is not None
    fixed, before = context.clone(), context.pictures.patches_PKC.clone()
    other = TokenContext(torch.arange(B) + 5, S, pictures=PatchRows(255 - before, torch.tensor([1, 0])))
    fixed.copy_(other)

    assert fixed.pictures is not None
    assert torch.equal(fixed.pictures.patches_PKC, 255 - before)
    assert fixed.pictures.place_K.tolist() == [1, 0]
    assert torch.equal(context.pictures.patches_PKC, before)
    for form in (
        TokenContext(torch.arange(B), S),
        TokenContext(torch.arange(B), S, pictures=PatchRows.of_all(before[1:])),
    ):
        with pytest.raises(ValueError, match=r"cannot copy a context of"):
            fixed.copy_(form)
