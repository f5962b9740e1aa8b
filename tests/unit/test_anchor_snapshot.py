"""Snapshots of weights: both ends hold the same bits, errors do not add up, bytes are as planned."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.anchor.blockwise import BLOCK_SIZE, code_bytes, quantise, restore
from hf_meshadapt.anchor.messages import Message, MessageError, decode, encode
from hf_meshadapt.anchor.snapshot import Layout, SnapshotDecoder, SnapshotEncoder, choose_bits, snapshot_bytes

SHAPES = {"embed": (10, 7), "norm": (64,), "scalar": (), "none": (0, 3), "odd": (3, 5, 5)}


def weights(step: int, shapes=SHAPES) -> dict[str, torch.Tensor]:
    """Weights that walk at random."""
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for _ in range(step):
        values = {n: v + 1e-3 * torch.randn(v.shape, generator=generator) for n, v in values.items()}
    return values


def travelled(message: Message) -> Message:
    return decode(encode(message), 10**8)


def largest_error(one: dict, other: dict) -> float:
    return max(((one[name] - other[name]).abs().max().item() for name in one if one[name].numel()), default=0.0)


def code_value_by_value(block: list[float], bits: int) -> list[float]:
    """The oracle: what a block of values becomes."""
    top = 2 ** (bits - 1) - 1
    scale = torch.tensor(max(abs(value) for value in block) / top).to(torch.bfloat16).item()
    return [max(-top, min(top, round(value / scale))) * scale if scale else 0.0 for value in block]


@pytest.mark.parametrize("bits", [8, 4])
def test_quantiser_is_its_oracle_within_its_bound(bits):
    values = torch.randn(6, BLOCK_SIZE, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [1.0, 1e-20, 0.0, 1e20, 1e-3, 5.0]
    ).view(-1, 1)
    codes, scales = quantise(values, bits)
    assert codes.dtype == torch.uint8 and scales.dtype == torch.bfloat16
    assert codes.numel() + 2 * scales.numel() == code_bytes(6, bits)
    restored = restore(codes, scales, bits)
    oracle = torch.tensor([code_value_by_value(row, bits) for row in values.tolist()])
    torch.testing.assert_close(restored, oracle, rtol=1e-6, atol=0)
    bound = scales.float() / 2 + values.abs().amax(1) / 256
    assert ((values - restored).abs().amax(1) <= bound).all()


@settings(max_examples=40, deadline=None)
@given(
    full_bits=st.sampled_from([16, 32]),
    delta_bits=st.sampled_from([8, 4]),
    num_slices=st.integers(1, 9),
    steps=st.lists(st.integers(0, 12), min_size=1, max_size=5),
)
def test_both_ends_hold_the_same_bits_after_every_message(full_bits, delta_bits, num_slices, steps):
    encoders = [SnapshotEncoder(0, full_bits, delta_bits, index, num_slices) for index in range(num_slices)]
    decoders = [SnapshotDecoder() for _ in encoders]
    for version, step in enumerate(steps):
        for encoder, decoder in zip(encoders, decoders):
            decoder.decode(travelled(encoder.encode(version, weights(step))))
            assert decoder.version == encoder.version == version
            assert torch.equal(decoder.reference, encoder.reference)
    whole = torch.cat([decoder.reference for decoder in decoders])
    held = decoders[0].layout.unpack(whole)
    assert {name: tuple(tensor.shape) for name, tensor in held.items()} == SHAPES
    assert largest_error(weights(steps[-1]), held) < (1e-6 if steps == [steps[0]] and full_bits == 32 else 0.02)


@pytest.mark.parametrize("bits", [8, 4])
def test_errors_do_not_add_up(bits):
    encoder, errors = SnapshotEncoder(0, 32, bits), []
    for version in range(30):
        encoder.encode(version, weights(version))
        layout = Layout({name: tuple(tensor.shape) for name, tensor in weights(0).items()})
        errors.append(largest_error(weights(version), layout.unpack(encoder.reference)))
    assert errors[0] == 0
    top = 2 ** (bits - 1) - 1
    assert (
        max(errors[1:]) < 2 * 5e-3 / top
    )  # one step's difference is below 5e-3; its error half a level, with a margin


def test_weights_that_rest_are_soon_exact():
    encoder = SnapshotEncoder(0, 16, 4)
    errors = []
    for version in range(6):
        encoder.encode(version, weights(0))
        errors.append(largest_error(weights(0), Layout(SHAPES).unpack(encoder.reference)))
    assert all(later <= earlier / 4 for earlier, later in zip(errors, errors[1:]) if earlier > 1e-7)


def test_after_a_reset_the_next_is_whole_again():
    encoder = SnapshotEncoder(0)
    encoder.encode(0, weights(0))
    assert set(encoder.encode(1, weights(1)).tensors) == {"codes", "scales"}
    encoder.reset()
    message = encoder.encode(2, weights(2))
    assert set(message.tensors) == {"values"}
    newcomer = SnapshotDecoder()
    newcomer.decode(message)
    assert torch.equal(newcomer.reference, encoder.reference)


@pytest.mark.parametrize("reconnected", [False, True])
def test_an_exact_encoder_continues_as_if_nothing_had_happened(reconnected):
    steady, decoder = SnapshotEncoder(0, exact=True), SnapshotDecoder()
    for version in range(3):
        steady.encode(version, weights(version))
    resumed = SnapshotEncoder(0, exact=True)
    resumed.load_state_tensors({name: tensor.clone() for name, tensor in steady.state_tensors().items()})
    if reconnected:
        resumed.reset()
    steady.encode(3, weights(3))
    decoder.decode(travelled(resumed.encode(3, weights(3))))
    assert torch.equal(decoder.reference, steady.reference)
    decoder.decode(travelled(resumed.encode(4, weights(4))))
    steady.encode(4, weights(4))
    assert torch.equal(decoder.reference, steady.reference)
    assert SnapshotEncoder(0, exact=True).state_tensors() == {}


def test_broken_weights_are_refused_and_change_nothing():
    encoder = SnapshotEncoder(0)
    encoder.encode(0, weights(0))
    before = encoder.reference.clone()
    broken = weights(1)
    broken["norm"][3] = float("nan")
    with pytest.raises(ValueError, match="not finite at step 1: norm"):
        encoder.encode(1, broken)
    with pytest.raises(ValueError, match="names or shapes differ"):
        encoder.encode(1, {"norm": torch.zeros(64)})
    assert torch.equal(encoder.reference, before) and encoder.version == 0
    with pytest.raises(ValueError, match="not finite at step 0: w"):
        SnapshotEncoder(0).encode(0, {"w": torch.tensor([float("inf")])})


def test_messages_that_do_not_fit_are_refused_and_change_nothing():
    encoder, decoder = SnapshotEncoder(0), SnapshotDecoder()
    full = encoder.encode(0, weights(0))
    first, second = encoder.encode(1, weights(1)), encoder.encode(2, weights(2))
    with pytest.raises(MessageError, match="difference from step 0, this end holds None"):
        decoder.decode(first)
    decoder.decode(full)
    with pytest.raises(MessageError, match="difference from step 1, this end holds 0"):
        decoder.decode(second)

    def changed(message, tensors=None, **fields):
        return Message("snapshot", {**message.fields, **fields}, message.tensors if tensors is None else tensors)

    short = {name: tensor[:-1] for name, tensor in first.tensors.items()}
    for message in (
        changed(first, short),
        changed(first, {}),
        changed(first, code_bits=5),
        changed(first, code_bits=0),
        changed(first, slice=1),
        changed(first, num_slices=0),
        changed(full, shapes=[["w", [10**15]]]),
        changed(full, shapes=[["w", [-1]]]),
        changed(full, shapes=[["w"]]),
        changed(full, shapes=None),
        changed(full, value_bits=32),
    ):
        with pytest.raises(MessageError):
            decoder.decode(message)
    assert decoder.version == 0
    decoder.decode(first)
    assert decoder.version == 1


@pytest.mark.parametrize("num_slices", [1, 2, 7, 50])
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_bytes_are_as_planned(bits, num_slices):
    for index in range(num_slices):
        full = bits >= 16
        encoder = SnapshotEncoder(0, bits if full else 16, 8 if full else bits, index, num_slices)
        message = encoder.encode(0, weights(0))
        if not full:
            message = encoder.encode(1, weights(1))
        sent_bytes = sum(tensor.numel() * tensor.element_size() for tensor in message.tensors.values())
        assert sent_bytes == snapshot_bytes(SHAPES, bits, index, num_slices)
        assert full or len(encode(message)) < sent_bytes + 600


@pytest.mark.parametrize("num_slices", [1, 3, 11])
def test_slices_make_up_the_whole(num_slices):
    layout = Layout(SHAPES)
    slices = [list(layout.slice_range(index, num_slices)) for index in range(num_slices)]
    assert sum(slices, []) == list(range(layout.num_blocks))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1
    assert len(slices[-1]) == max(map(len, slices))


def test_bits_by_budget():
    shapes = {"w": (64, 100)}
    assert choose_bits(shapes, 6600) == 8
    assert choose_bits(shapes, 6599) == 4
    assert choose_bits(shapes, 3400) == 4
    assert choose_bits(shapes, 3300, num_slices=2) == 8
    with pytest.raises(ValueError, match=r"3399 bytes is below 3400.*anchor_every"):
        choose_bits(shapes, 3399)


@pytest.mark.parametrize(
    "arguments,said",
    [
        (dict(full_bits=8), "full_bits=8"),
        (dict(delta_bits=3), "delta_bits=3"),
        (dict(index=2, num_slices=2), "slice 2 must be one of 2"),
    ],
)
def test_arguments_are_checked(arguments, said):
    with pytest.raises(ValueError, match=said):
        SnapshotEncoder(0, **arguments)
