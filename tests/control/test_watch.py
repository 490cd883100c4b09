from megatron_resilience.control.watch import PING_S, Alarm, Pulse, Watch


def simulate(pulse, until, answers=lambda now: True, step=0.1, watch=None):
    """Looks every tenth of a second; returns the alarms with their times."""
    watch, found, now = watch or Watch(), [], 0.0
    while now < until:
        ask, alarms = watch.look({0: pulse}, now)
        if ask and answers(now):
            pulse.answers(True, now)
        found += [(round(now, 1), alarm) for alarm in alarms.values()]
        now += step
    return found


def training(limit, in_step=True):
    pulse = Pulse()
    pulse.begins(limit, 0.0)
    pulse.enters(3, in_step, 0.0)
    return pulse


def test_a_frozen_rank_is_noticed_within_its_limit_and_a_second():
    frozen_at = 4.0
    ((when, alarm),) = simulate(training(3.0, in_step=False), 20, answers=lambda now: now < frozen_at)
    assert alarm is Alarm.FROZEN
    assert frozen_at + 3.0 - PING_S <= when <= frozen_at + 3.0 + 1.0


def test_a_step_that_does_not_end_is_noticed_again_and_again():
    assert [alarm for _, alarm in simulate(training(3.0), 10)] == [Alarm.STALLED] * 3


def test_between_two_steps_any_time_may_pass():
    assert simulate(training(1.0, in_step=False), 30) == []


def test_a_rank_at_rest_is_not_watched():
    pulse = training(1.0)
    pulse.rests()
    assert simulate(pulse, 30, answers=lambda now: False) == []


def test_a_suspended_machine_blames_nobody():
    pulse, watch = training(3.0), Watch()
    assert simulate(pulse, 1.0, watch=watch) == []
    assert watch.look({0: pulse}, 100.0)[1] == {}


def test_a_generation_is_that_of_the_step_that_was_entered():
    """A step that has ended is not a step that was entered: what is done again is counted from here."""
    pulse = training(3.0)
    pulse.enters(4, False, 1.0)
    assert (pulse.generation, pulse.in_step) == (3, False)
    pulse.enters(4, True, 2.0)
    assert (pulse.generation, pulse.in_step) == (4, True)
