"""What people ask for through the page: checked, limited, audited, then asked of the driver or written to etcd."""
