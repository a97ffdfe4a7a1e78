"""The figures of the paper, as data: Y. P. Shkolnikov, Learnable Pulse Accumulation (2026), Tables 1 to 11.

Its numbers, in words of our own. Table 3, 5 and 9 hold the same measurements; 9 has all of them.
"""

from __future__ import annotations

# Table 1: dev-clean WER % at 8 of 12 layers, one technique more a row; the first five were corrected by an offset.
ABLATION = (
    ("naive replacement", 58.33),
    ("+ start from the attention's weights, train layer norms", 26.50),
    ("+ alignment of all replaced layers", 16.18),
    ("+ train the feed-forward layers too", 14.64),
    ("+ temperature curriculum", 11.72),
    ("+ periodic and positional gates", 10.25),
    ("+ skips, several heads, 360 h of speech", 9.77),
    ("+ order by the sweep", 9.35),
)

# Table 2: SI-SNRi in dB on test-clean, by replaced intra-chunk layers of 16; attention trained on alike gave 11.34.
SEPFORMER = {0: 5.69, 2: 8.89, 4: 8.92, 8: 8.14, 11: 7.68, 16: 6.82}
SEPFORMER_CONTROL = 11.34

# Tables 3, 5, 9: ms of the whole model on an Apple M4 Pro, batch 1, by seconds of audio.
SPEED_COLUMNS = ("attention, fp32", "attention, fp16", "8/12 LPA, fp32", "12/12 LPA, fp32", "8/12 LPA, MLX fp16")
SPEED = {
    10: (47.1, 45.3, 58.8, 65, 42.4),
    30: (182.7, 186.1, 156.9, 135, 124.9),
    60: (499.7, 521.6, 349.5, 246, 244.2),
    120: (1668.0, 1767.1, 894.8, 479, 540.1),
}
SPEEDUP_MLX = {10: 1.07, 30: 1.49, 60: 2.14, 120: 3.27}  # 8/12 in MLX against attention in fp16
SPEEDUP_TORCH = {10: 0.69, 30: 1.38, 60: 2.12, 120: 3.69}  # 12/12 in PyTorch, fp32, against attention in fp16
# the same against attention in fp32, as ours is: of its times, for it has no such column
SPEEDUP_FP32 = {seconds: attention / lpa for seconds, (attention, _, _, lpa, _) in SPEED.items()}

# Table 4: by replaced layers, LPA and SummaryMixing: wav2vec2 WER %, SepFormer SI-SNRi dB.
SUMMARY = {
    0: (3.18, 3.18, 5.69, 5.69),
    1: (4.26, 5.44, 7.27, 8.38),
    2: (4.64, 7.31, 8.89, 9.60),
    4: (6.38, 15.47, 8.92, 9.62),
    8: (9.92, 29.04, 8.14, 9.12),
    16: (None, None, 6.82, 7.88),
}

# Table 6: (layer, MSE against its attention, pulses of 144 that survive, how hard the paper calls it), easiest first.
SWEEP = (
    *((0, 0.006, 48, "easy"), (2, 0.007, 48, "easy"), (1, 0.007, 51, "easy")),
    *((3, 0.021, 57, "moderate"), (6, 0.030, 74, "moderate"), (5, 0.034, 75, "moderate")),
    *((7, 0.043, 87, "hard"), (8, 0.046, 100, "hard"), (9, 0.052, 87, "hard"), (4, 0.065, 89, "hard")),
    *((10, 0.096, 96, "very hard"), (11, 0.370, 107, "very hard")),
)

# Table 7: WER % by replaced layers of 12.
PROGRESSIVE_COLUMNS = ("naive", "+ recipe", "+ architecture", "+ order")
PROGRESSIVE = {
    0: (3.34, 3.34, 3.34, 3.34),
    1: (4.59, 4.88, 4.38, 4.25),
    2: (6.21, 5.17, 4.71, 4.67),
    3: (9.94, 7.17, 6.55, 4.77),
    4: (10.43, 6.93, 6.35, 5.31),
    5: (13.20, 7.73, 7.24, 5.26),
    6: (14.42, 7.78, 7.32, 5.64),
    7: (19.52, 8.05, 7.74, 7.64),
    8: (58.33, 10.25, 9.77, 9.35),
    9: (69.57, 17.35, 14.88, 14.19),
    10: (None, 37.51, 28.13, 28.02),
}

# Table 8: WER % by replaced layers of 12.
SPLITS = ("dev-clean", "test-clean", "test-other")
BY_SPLIT = {
    0: (3.18, 3.37, 8.67),
    1: (4.26, 4.63, 11.83),
    2: (4.64, 4.78, 12.67),
    4: (6.38, 6.62, 16.52),
    6: (7.35, 7.90, 18.98),
    7: (7.90, 8.50, 20.84),
    8: (9.92, 10.61, 27.10),
    9: (15.82, 16.56, 37.08),
    10: (30.39, 31.62, 54.51),
}

# Table 10, Figure 4: one layer's scores (one head's n × n) in MB of 2^20 bytes, its gates (12 pulses) in KB of 2^10,
# float32, and how many times less the gates are
MEMORY = {10: (0.95, 23, 42), 30: (8.6, 70, 125), 60: (34.3, 140, 250), 120: (137.3, 281, 500)}

# Table 11: microseconds a layer at 6,000 frames by its roofline: attention, 12 and 36 pulses.
ROOFLINE_GB, ROOFLINE_GFLOP = 273, 16_700  # a second
ROOFLINE = (
    ("linear projections", 1696, 1696, 1696),
    ("scores, or gates", 3311, 797, 807),
    ("softmax, or element-wise", 2110, 201, 201),
    ("weighted sum, or accumulation", 3311, 136, 142),
    ("whole layer", 10428, 2835, 2851),
)
TWELVE_LAYERS_MS = (125, 34.0, 34.2)
