"""How steps run: eagerly, compiled or as CUDA graphs; their memory; reading results late; streaming."""
