import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unigrad_fast.pipelines.order import batch_indices, epoch_order
from unigrad_fast.pipelines.philox import philox4x32

seeds = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(  # the known answers that come with Random123
    "counter, key, answer",
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_answers(counter, key, answer):
    counter, key, answer = ([int(word, 16) for word in words.split()] for words in (counter, key, answer))
    assert philox4x32(np.array(counter, np.uint32), tuple(key)).tolist() == answer


@given(seeds, st.integers(0, 10**6), st.integers(1, 500))
def test_order_is_a_permutation(seed, epoch, count):
    assert np.array_equal(np.sort(epoch_order(seed, epoch, count)), np.arange(count))


def test_order_differs_by_epoch_and_by_either_half_of_the_seed():
    orders = [epoch_order(*of, 103).tolist() for of in [(0, 0), (0, 1), (1, 0), (1 << 32, 0), (1, 1)]]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_every_image_comes_to_every_place_equally_often():
    count, epochs = 8, 4000
    places = np.stack([epoch_order(3, epoch, count) for epoch in range(epochs)])
    table = np.stack([np.bincount(places[:, place], minlength=count) for place in range(count)])
    expected = epochs / count
    # Chi-square with (8 - 1)² degrees of freedom: mean 49, deviation 10.
    assert ((table - expected) ** 2 / expected).sum() < 49 + 4 * 10


@st.composite
def layouts(draw):
    world_size, accumulation, share = (
        draw(st.integers(1, 5)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 6)),
    )
    batch_size = world_size * accumulation * share
    return world_size, accumulation, batch_size, draw(st.integers(batch_size, 4 * batch_size + 50))


def gathered(seed, step, count, batch_size, accumulation, world_size):
    """The images of one optimizer step in the order of micro-batches and ranks."""
    return np.concatenate(
        [
            batch_indices(seed, step * accumulation + part, count, batch_size, accumulation, rank, world_size)[1]
            for part in range(accumulation)
            for rank in range(world_size)
        ]
    )


@given(seeds, st.integers(0, 50), layouts())
def test_optimizer_step_is_the_same_for_any_ranks_and_accumulation(seed, step, layout):
    world_size, accumulation, batch_size, count = layout
    alone = gathered(seed, step, count, batch_size, 1, 1)
    assert np.array_equal(gathered(seed, step, count, batch_size, accumulation, world_size), alone)


@given(seeds, st.integers(0, 3), layouts())
@settings(max_examples=50)
def test_epoch_shows_each_image_at_most_once_and_leaves_out_less_than_a_batch(seed, epoch, layout):
    world_size, accumulation, batch_size, count = layout
    steps = count // batch_size
    seen = np.concatenate(
        [gathered(seed, epoch * steps + step, count, batch_size, accumulation, world_size) for step in range(steps)]
    )
    assert len(np.unique(seen)) == len(seen) > count - batch_size


def test_103_images_on_4_ranks_are_all_seen_within_few_epochs():
    steps = 103 // 8
    seen = [
        batch_indices(0, step, 103, 8, rank=rank, world_size=4)[1] for step in range(4 * steps) for rank in range(4)
    ]
    assert len(np.unique(np.concatenate(seen))) == 103


def test_step_knows_its_epoch():
    assert [batch_indices(0, step, 103, 40, accumulation_steps=2)[0] for step in range(9)] == [0] * 4 + [1] * 4 + [2]
