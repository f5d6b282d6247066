"""The field's protocol: each question with its own passages, and the published selections at equal cost."""
