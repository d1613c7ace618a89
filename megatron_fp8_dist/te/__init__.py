"""The only room that knows Transformer Engine's attributes. It never imports Transformer Engine."""
