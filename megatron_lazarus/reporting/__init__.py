"""What a run tells of itself: goodput, and the report of a job's events."""
