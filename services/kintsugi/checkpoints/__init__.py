"""Files that ship with Kintsugi: a small trained model and passages to ask about."""
