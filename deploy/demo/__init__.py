"""The demo: a tiny model learns to sort four digits through the whole service. The door is `deploy.demo.main`."""
