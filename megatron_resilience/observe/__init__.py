"""What people and scripts see: the event log, one summary per recovery, traces for comparison."""
