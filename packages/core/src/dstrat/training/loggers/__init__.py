"""Loggers: CSV, TensorBoard, Weights & Biases, MLflow, Comet."""
