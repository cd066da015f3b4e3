"""The paper's simulated tables and figures, reproduced: `python -m benchmarks.paper FOLDER`."""
