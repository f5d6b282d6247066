"""The measurements on a real model: questions over passages, rows of configurations, figures."""
