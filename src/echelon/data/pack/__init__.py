"""Making record files: `lists` (.lst files), `im2rec` (images), `convert` (published sets); `extract` reverses it."""
