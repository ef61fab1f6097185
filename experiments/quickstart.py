"""quick"""
import ml_collections

def get_config():
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="encoder_decoder", vocab_size=4096, d_model=128, d_ff=512, num_heads=4, num_encoder_layers=2, num_decoder_layers=2,
        max_length=128, position="sinusoidal", norm_placement="pre", dropout=0.1, scan_layers=False, embedding_scale=True,
    )
    config.data = dict(corpus="tatoeba_en_es", objective="seq2seq", length=64, batch_size=16)
    config.optimizer = dict(learning_rate=2e-3, schedule="cosine", warmup_steps=400, clip_norm=1.0)
    config.train = dict(steps=300, eval_every=200, log_every=50, checkpoint_every=200)
    return config
