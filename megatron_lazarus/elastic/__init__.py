"""Membership and regrouping: who takes part, in which generation, and the process groups of that generation."""
