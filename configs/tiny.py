"""The tiny random model: every command in seconds, for a first try and tests.

    kvgraft demo --config=configs/tiny.py

Expected: the last line has `"sha256_equal": true`. The text is noise, since the
weights are random, and so small a model gains little time by grafting.
"""


def get_config() -> dict[str, object]:
  """Returns flag values; the command line wins."""
  return {'model': 'tiny:0', 'dtype': 'bfloat16', 'capacity': 4096}
