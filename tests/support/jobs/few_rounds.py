"""A plugin that ranks import: benches that measure a call a few times instead of often."""

from eprt.bench import dispatch, layer, placed

layer.ROUNDS = 3
placed.TURNS, placed.ROUNDS, placed.REPEATS = 2, 2, 2
dispatch.EAGER_ROUNDS = 3
