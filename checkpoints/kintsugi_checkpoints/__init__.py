"""Data of Kintsugi: a small trained model with its calibration report, passages, and the demo's questions."""
