r"""The flywheel on the shipped problems with the embedded Gemma 3 270M.

    kvgraft flywheel runs/shipped --config=configs/flywheel_270m.py

Expected: all 40 base problems become entries, `wrong_hits` 0, `grafts_equal`
80 (two rounds), exit code 0. Takes about 40 minutes on two cores.
"""


def get_config() -> dict[str, object]:
  """Returns flag values; the command line wins."""
  return {'model': 'gemma3-270m', 'dataset': 'shipped', 'budget': 512,
          'rounds': 2}
