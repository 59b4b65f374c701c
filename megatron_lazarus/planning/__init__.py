"""Pure planning: replica counts, placements, mappings, migrations, survival. No process group, device or clock."""
