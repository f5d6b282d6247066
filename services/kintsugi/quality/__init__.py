"""How good blended answers are: measured against full prefill, calibrated, watched while serving."""
