"""DATA PLANE: jax. Nothing in this folder imports the control plane (`swiftjax.engine`)."""
