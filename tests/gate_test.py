"""Confident votes, and what stands where they contradict a graft."""

import pytest

from kvgraft_jax import errors
from kvgraft_jax import gate

_SURE = gate.Vote('7', 3, 4)


@pytest.mark.parametrize('answers, expected', [
    ([], (None, 0, 0)),
    ([None, None], (None, 0, 2)),
    (['7', '7', None, '8'], ('7', 2, 4)),
    (['8', '7', '7', '8'], ('8', 2, 4)),  # Of equals the first.
])
def test_a_vote_counts_answers_and_samples(answers, expected):
  found = gate.count(answers)
  assert (found.answer, found.count, found.samples) == expected


def test_a_vote_counts_what_is_the_same_as_one():
  same = gate.count(['7', '7.0', '8'], lambda a, b: float(a) == float(b))
  assert (same.answer, same.count) == ('7', 2)


@pytest.mark.parametrize('vote, sure', [
    (gate.Vote('7', 3, 4), True), (gate.Vote('7', 2, 4), False),
    (gate.Vote('7', 3, 3), False), (gate.Vote(None, 0, 4), False),
    (gate.Vote('7', 4, 4), True)])
def test_a_vote_is_confident_from_a_share_of_enough_samples(vote, sure):
  assert gate.Gate(least=4, share=75).confident(vote) is sure


@pytest.mark.parametrize('policy, grafted, vote, expected', [
    ('library', '8', _SURE, ('8', 'grafted')),
    ('vote', '8', _SURE, ('7', 'vote')),
    ('abstain', '8', _SURE, (None, 'abstain')),
    *((policy, '7', _SURE, ('7', 'grafted')) for policy in gate.POLICIES),
    *((policy, '8', gate.Vote('7', 2, 4), ('8', 'grafted'))
      for policy in gate.POLICIES),
    *((policy, None, _SURE, ('7', 'vote')) for policy in gate.POLICIES),
    *((policy, None, gate.Vote('7', 2, 4), (None, 'none'))
      for policy in gate.POLICIES),
])
def test_every_policy_decides_and_says_why(policy, grafted, vote, expected):
  found = gate.Gate(policy).decide(grafted, vote)
  assert (found.answer, found.why) == expected


def test_what_is_the_same_does_not_contradict():
  found = gate.Gate('vote').decide(
      '7.0', _SURE, lambda a, b: float(a) == float(b))
  assert (found.answer, found.why) == ('7.0', 'grafted')


@pytest.mark.parametrize('values, word', [
    ({'policy': 'guess'}, 'policy'), ({'least': 0}, 'at least 1'),
    ({'share': 50}, '51 to 100'), ({'share': 101}, '51 to 100')])
def test_a_senseless_gate_is_refused(values, word):
  with pytest.raises(errors.UsageError, match=word):
    gate.Gate(**values)
