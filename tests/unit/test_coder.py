"""SendCoded and ReceiveCoded, alone and inside BoundarySend and BoundaryReceive: straight-through, over bytes."""

from __future__ import annotations

import pytest
import torch

from hf_meshadapt.boundary.coder import BoundaryCoder, ReceiveCoded, SendCoded, empty_carrier
from hf_meshadapt.boundary.fitting import BoundaryFit, fit_boundary
from hf_meshadapt.boundary.module import BoundaryReceive, BoundarySend, wire_tensors
from hf_meshadapt.boundary.observer import Observer
from hf_meshadapt.boundary.predictor import project_embedding
from hf_meshadapt.boundary.sequence_coder import FIRST, PADDING, TARGET, TOKEN
from hf_meshadapt.config import BoundaryConfig

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, HIDDEN, BATCH, LENGTH = 50, 32, 3, 12
DTYPES = [torch.float32, torch.bfloat16]
CONFIG = BoundaryConfig(
    "transform", exact_first_token=True, predictor="token", wire_dtype="bfloat16", budget=0.4, loss_weighted=True
)
# Left padding, a plain row, and three packed sequences.
KIND = torch.tensor(
    [
        [PADDING] * 3 + [FIRST] + [TOKEN] * 4 + [TARGET] * 4,
        [FIRST] + [TARGET] * 11,
        ([FIRST] + [TOKEN] * 2 + [TARGET]) * 3,
    ],
    dtype=torch.int8,
)


def hidden_states(token_ids: torch.Tensor) -> torch.Tensor:
    """Half told by the token, around a mean."""
    generator = torch.Generator().manual_seed(1)
    by_token = torch.randn(VOCAB, HIDDEN, generator=generator) + 2
    return by_token[token_ids] + torch.randn(*token_ids.shape, HIDDEN) * torch.linspace(0.05, 2, HIDDEN)


def calibrated(predictor: str = "token") -> tuple[BoundaryFit, torch.Tensor | None]:
    table = project_embedding(torch.randn(VOCAB, HIDDEN), 16) if predictor == "token" else None
    observer = Observer(HIDDEN, table, "cpu")
    for index in range(8):
        observer.held_out = index % 4 == 3
        token_ids = torch.randint(VOCAB, (8, 16))
        kind = torch.tensor([FIRST] + [TOKEN] * 7 + [TARGET] * 8).expand(8, 16)
        passed = observer(hidden_states(token_ids).requires_grad_(), token_ids, kind)
        passed.backward(torch.randn(8, 16, HIDDEN) * torch.linspace(0.1, 1, HIDDEN))
    return fit_boundary(observer.moments(), transforms=True, weighted=True), table


def make_coders(config: BoundaryConfig = CONFIG) -> tuple[BoundaryCoder, BoundaryCoder]:
    """Of the sending and of the receiving end, which got the same fit as named tensors."""
    fit, table = calibrated(config.predictor)
    again = BoundaryFit.from_state({name: tensor.clone() for name, tensor in fit.state().items()})
    return BoundaryCoder(config, HIDDEN, fit, table), BoundaryCoder(config, HIDDEN, again, table)


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    token_ids = torch.randint(VOCAB, (BATCH, LENGTH))
    return hidden_states(token_ids).to(dtype).requires_grad_(), token_ids, KIND


# Coder ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("predictor", ["token", "mean"])
def test_hidden_states_survive_and_first_tokens_are_exact(predictor):
    config = BoundaryConfig("transform", exact_first_token=True, predictor=predictor, budget=0.4)
    sender, receiver = make_coders(config)
    hidden, token_ids, kind = batch()
    packed = sender.encode(hidden, token_ids, kind)
    assert packed.shape == (BATCH, config.sequence_bytes(LENGTH, HIDDEN, "forward"))
    decoded, predicted = receiver.decode(packed, token_ids, kind), receiver.predict(token_ids, kind)
    assert torch.equal(decoded[kind == FIRST], hidden[kind == FIRST].bfloat16().float())
    assert torch.equal(decoded[kind == PADDING], predicted[kind == PADDING])
    tokens = (kind == TOKEN) | (kind == TARGET)
    error, surprise = (decoded - hidden.detach())[tokens], (predicted - hidden.detach())[tokens]
    assert float(error.square().sum()) < 0.05 * float(surprise.square().sum())


@pytest.mark.parametrize(
    "codec", ["transform", "whole bits", "subspace", "bottleneck", "topk", "topk_free_indices", "quantize"]
)
def test_starts_of_packed_sequences_are_exact_within_the_same_bytes(codec):
    """As many as half of the bytes hold; the others are coded as ordinary tokens."""
    options = {"entropy_coded": False} if codec == "whole bits" else {}
    codec = "transform" if codec == "whole bits" else codec
    config = BoundaryConfig(codec, exact_first_token=True, predictor="token", budget=0.4, **options)
    sender, receiver = make_coders(config)
    hidden, token_ids, kind = batch()
    packed = sender.encode(hidden, token_ids, kind)
    num_bytes = config.sequence_bytes(LENGTH, HIDDEN, "forward")
    assert packed.shape == (BATCH, num_bytes)
    decoded, starts = receiver.decode(packed, token_ids, kind)[2], (kind[2] == FIRST).nonzero().squeeze(1)
    exact = (decoded == hidden[2].bfloat16().float()).all(dim=1)
    assert exact.nonzero().squeeze(1).tolist() == starts[: num_bytes // 2 // (2 * HIDDEN)].tolist()
    assert bool(decoded.isfinite().all())


def test_a_packed_start_is_not_predicted_from_the_sequence_before():
    coder, _ = make_coders()
    token_ids = torch.randint(VOCAB, (BATCH, LENGTH))
    other = token_ids.clone()
    other[2, 3] += 1  # the last of the first of three packed sequences
    before, after = (coder.predict(ids % VOCAB, KIND)[2] for ids in (token_ids, other))
    assert (before != after).any(dim=1).nonzero().squeeze(1).tolist() == [3]


def test_without_transforms_a_coder_only_predicts():
    config = BoundaryConfig("random_mask", mask_ratio=0.5, predictor="mean")
    coder = BoundaryCoder(config, HIDDEN, BoundaryFit(torch.randn(1, HIDDEN), None, None, 0.0), None)
    assert coder.forward is None and coder.backward is None
    assert torch.equal(coder.predict(torch.zeros(2, 3).long(), None), coder.fit.weights.expand(2, 3, HIDDEN))


def test_gradients_are_coded_by_themselves_whatever_their_scale():
    sender, receiver = make_coders()
    gradient = torch.randn(BATCH, LENGTH, HIDDEN) * torch.linspace(0.1, 1, HIDDEN)
    packed = sender.encode_gradient(gradient, KIND)
    assert packed.shape == (BATCH, CONFIG.sequence_bytes(LENGTH, HIDDEN, "backward"))
    decoded = receiver.decode_gradient(packed, KIND)
    assert not decoded[KIND == PADDING].any()
    cosine = torch.nn.functional.cosine_similarity(decoded[KIND != PADDING], gradient[KIND != PADDING], dim=1)
    assert float(cosine.min()) > 0.8
    tiny = receiver.decode_gradient(sender.encode_gradient(gradient * 2.0**-30, KIND), KIND)
    assert torch.equal(tiny, decoded * 2.0**-30)


def test_both_directions_get_their_share_of_the_bytes():
    sizes = [CONFIG.sequence_bytes(LENGTH, HIDDEN, way) for way in ("forward", "backward")]
    dense_bytes = 2 * LENGTH * HIDDEN * 2
    assert 0.4 * dense_bytes - 4 < sum(sizes) <= 0.4 * dense_bytes
    assert sizes[0] == pytest.approx(3 * sizes[1], abs=8)


# In graph ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("received_dtype", DTYPES)
def test_forward_is_decode_of_encode_and_backward_likewise(dtype, received_dtype):
    sender, receiver = make_coders()
    hidden, token_ids, kind = batch(dtype)
    payload, carrier = SendCoded.apply(hidden, sender, token_ids, kind)
    assert payload.dtype == torch.uint8 and not payload.requires_grad
    assert torch.equal(payload, sender.encode(hidden, token_ids, kind))
    like = empty_carrier(CONFIG, HIDDEN, BATCH, LENGTH, "cpu")
    assert (carrier.shape, carrier.dtype) == (like.shape, torch.bfloat16) and carrier.requires_grad
    carrier.retain_grad()

    received = ReceiveCoded.apply(payload, carrier, receiver, token_ids, kind, received_dtype)
    assert received.dtype == received_dtype and received.requires_grad
    assert torch.equal(received, receiver.decode(payload, token_ids, kind).to(received_dtype))

    gradient = torch.randn(BATCH, LENGTH, HIDDEN).to(received_dtype)
    received.backward(gradient)
    coded = receiver.encode_gradient(gradient, kind)
    assert torch.equal(carrier.grad.view(torch.uint8), coded)
    assert hidden.grad.dtype == dtype
    assert torch.equal(hidden.grad, sender.decode_gradient(coded, kind).to(dtype))


def test_a_carriers_values_do_not_matter_and_any_bytes_survive_autograd():
    """Coded gradients are bytes under the name of bfloat16; NaN patterns among them must arrive as they are."""
    sender, _ = make_coders()
    hidden, token_ids, kind = batch()
    payload, carrier = SendCoded.apply(hidden, sender, token_ids, kind)
    noise = torch.randint(256, (BATCH, 2 * carrier.shape[1]), dtype=torch.uint8)
    noise[:, :2] = 0xFF  # a NaN for the second time, wherever the gains are
    other = torch.full_like(carrier, float("nan")).requires_grad_()
    decoded = [ReceiveCoded.apply(payload, c, sender, token_ids, kind, torch.float32) for c in (carrier, other)]
    assert torch.equal(*decoded)
    seen = []
    sender.decode_gradient = lambda packed, kind: seen.append(packed.clone()) or torch.zeros_like(hidden)
    carrier.backward(noise.view(torch.bfloat16))
    assert torch.equal(seen[0], noise)


def make_ends(config: BoundaryConfig) -> tuple[BoundarySend, BoundaryReceive]:
    fit, table = calibrated(config.predictor)
    ends = BoundarySend(config, 0, HIDDEN), BoundaryReceive(config, 0, HIDDEN)
    for end in ends:
        end.set_fit(BoundaryFit.from_state(fit.state()), table)
    return ends


@pytest.mark.parametrize("dtype", DTYPES)
def test_through_the_modules_as_the_pipeline_wires_them(dtype):
    """In one graph, and over a wire on which only the payload travels and the receiver makes its own carrier."""
    send, receive = make_ends(CONFIG)
    hidden, token_ids, kind = batch(dtype)
    upstream = torch.randn(BATCH, LENGTH, HIDDEN).to(dtype)
    packed = send(hidden, 0, token_ids, kind)
    wire = wire_tensors(CONFIG, HIDDEN, BATCH, LENGTH, True, "cpu")
    assert [(p.shape, p.dtype) for p in packed] == [(w.shape, w.dtype) for w in wire]
    received = receive(packed, 0, token_ids, kind, LENGTH, dtype)
    received.backward(upstream)
    in_graph = hidden.grad.clone()

    payload, carrier = send(hidden, 0, token_ids, kind)
    arrived = payload.clone(), wire[1].clone().requires_grad_()
    over_wire = receive(arrived, 0, token_ids, kind, LENGTH, dtype)
    assert torch.equal(over_wire, received)
    over_wire.backward(upstream)
    hidden.grad = None
    carrier.backward(arrived[1].grad)
    assert torch.equal(hidden.grad, in_graph)
    sizes = [p.numel() * p.element_size() for p in (payload, arrived[1].grad)]
    assert sizes == [BATCH * CONFIG.sequence_bytes(LENGTH, HIDDEN, way) for way in ("forward", "backward")]


def test_gradients_pass_straight_through_at_a_wide_budget():
    """Whatever the forward did to the hidden state: the gradient is that of the decoded one."""
    send, receive = make_ends(BoundaryConfig("transform", predictor="mean", budget=0.9, forward_share=0.3))
    hidden, token_ids, kind = batch()
    (receive(send(hidden, 0, token_ids, kind), 0, token_ids, kind, LENGTH, torch.float32) ** 2).sum().backward()
    decoded = receive(send(hidden, 0, token_ids, kind), 0, token_ids, kind, LENGTH, torch.float32).detach()
    real = kind != PADDING
    error = (hidden.grad - 2 * decoded)[real].norm() / (2 * decoded)[real].norm()
    assert float(error) < 0.08
    assert not hidden.grad[~real].any()


def test_hidden_states_that_need_no_gradient():
    """A frozen first stage, and evaluation."""
    send, receive = make_ends(CONFIG)
    hidden, token_ids, kind = batch()
    packed = send(hidden.detach(), 0, token_ids, kind)
    assert not any(p.requires_grad for p in packed)
    with torch.no_grad():
        received = receive(send(hidden, 0, token_ids, kind), 0, token_ids, kind, LENGTH, torch.float32)
    assert not received.requires_grad
