r"""The real Gemma 3 270M of the extra `demo`, in bfloat16.

    kvgraft verify --config=configs/gemma3_270m.py --store=/tmp/store \
        --artifact=manual --continuations=50

Expected, on an artifact deposited with the same config: `sha256_equal` 50,
`argmax_agree` 50, `max_kl` 0.0, `greedy_tokens_equal` 64, exit code 0.
"""


def get_config() -> dict[str, object]:
  """Returns flag values; the command line wins."""
  return {'model': 'gemma3-270m', 'dtype': 'bfloat16', 'capacity': 32768}
