"""One image: `config` (the flags), `geometry` and `colour` (decide), `decode` and `augment` (act), `jpeg_cut`."""
