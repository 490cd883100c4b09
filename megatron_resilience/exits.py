"""Exit statuses: one table for every command, every launcher and the processes below them.

Signals keep the shell's custom (128 + number), and what the training script itself ends with is passed on.
"""

DONE = 0
FAILED = 1
IMPOSSIBLE = 2
UNREACHABLE = 3
LEFT = 75
"""sysexits' EX_TEMPFAIL."""
NODE_LEFT = 76
STUCK = 78
AGENT_LOST = 79

MEANINGS = {
    DONE: "it did what was asked; of a job: training is through",
    FAILED: "it began and did not come to its end; of `outcome`, also: nobody was left to say how the job ended",
    IMPOSSIBLE: "it cannot be done, and nothing was touched: a wrong option or file, a refusal, no such node, no spare, "
    "a layout or a job that cannot be",
    UNREACHABLE: "the job cannot be reached: it has ended, no agent answers, or they hold another secret",
    LEFT: "a job that was asked to end and saved its state: the same command goes on from it",
    NODE_LEFT: "a launcher whose node leaves a job that may go on without it",
    STUCK: "a rank that could not leave a dead world; its agent starts it again in place",
    AGENT_LOST: "a rank whose agent is gone",
}
"""Status to meaning, for the documents (``scripts/flags.py`` writes them)."""
