//! `[stores.NAME]`: the share of the configuration that each of several stores has.

use postbox_config::{Section, suggestion};
use postbox_core::StoreName;

use super::Config;

impl Config {
    /// Returns the configuration of each store, as if it were the only one. The name is set only
    /// where there are several.
    pub fn per_store(&self) -> Vec<(Option<StoreName>, Self)> {
        if self.stores.is_empty() {
            return vec![(None, self.clone())];
        }
        let share = |of: &crate::NamedStore| {
            let mut share = Self { store: of.config.clone(), stores: Vec::new(), ..self.clone() };
            share.subscriptions.retain(|it| it.stores.is_empty() || it.stores.contains(&of.name));
            share.sources.retain(|it| it.stores.is_empty() || it.stores.contains(&of.name));
            share.sources.iter_mut().for_each(|it| it.of_store = Some(of.name.clone()));
            (Some(of.name.clone()), share)
        };
        self.stores.iter().map(share).collect()
    }

    /// Returns the names of the stores; empty unless there are several.
    pub fn store_names(&self) -> Vec<&str> {
        self.stores.iter().map(|store| store.name.as_str()).collect()
    }

    pub(super) fn check_stores(&self, root: &Section<'_>) {
        if let Some(first) = self.stores.first().filter(|_| root.has("store")) {
            let text = format!(
                "[store] cannot be used together with [stores.{}]; give that store a name too: write [stores.NAME] \
                 instead of [store]",
                first.name
            );
            root.fault("store", text);
        }
        for (at, store) in self.stores.iter().enumerate() {
            if let Some(twin) = self.stores[..at].iter().find(|twin| twin.config.is_same(&store.config)) {
                let line = root.line_at(&["stores", store.name.as_str()]).unwrap_or_default();
                let text = format!("stores.{} is the same store as stores.{}; correct its url", store.name, twin.name);
                root.reader.fault(line, text);
            }
        }
        for it in &self.subscriptions {
            self.check_named(root, ["subscriptions", it.subscription.name.as_str()], &it.stores);
        }
    }

    /// Checks that a store for one tenant has no subscriptions: creating and driving them is done
    /// for all tenants at once.
    pub(super) fn check_tenants(&self, root: &Section<'_>) {
        for (name, share) in self.per_store() {
            let Some(first) = share.subscriptions.first().filter(|_| share.store.names_tenant()) else { continue };
            let path = name.as_ref().map_or_else(|| vec!["store"], |name| vec!["stores", name.as_str()]);
            let line = root.line_at(&[&path[..], &["tenant"]].concat()).unwrap_or_default();
            let text = format!(
                "{}.tenant: `run` and `dispatch` deliver for all tenants, and there is [subscriptions.{}]; remove \
                 `tenant` from [{}], or give the commands for one tenant a file without subscriptions",
                path.join("."),
                first.subscription.name,
                path.join(".")
            );
            root.reader.fault(line, text);
        }
    }

    /// Checks the stores of the sources, which only who receives needs.
    pub(super) fn check_sources(&self, root: &Section<'_>) {
        for it in &self.sources {
            self.check_named(root, ["sources", it.name.as_str()], &it.stores);
        }
        for source in self.sources.iter().filter(|source| source.is_pulled()) {
            let count = if source.stores.is_empty() { self.stores.len() } else { source.stores.len() };
            if count > 1 {
                let name = source.name.as_str();
                let at = [&["sources", name, "stores"][..], &["sources", name]];
                let line = at.iter().find_map(|path| root.line_at(path)).unwrap_or_default();
                let text = format!(
                    "sources.{name}: a broker's message can only go into one store, and this source has {count}; \
                     name one, e.g. stores = [{:?}], and add a source for each of the others",
                    self.stores.first().map_or("acme", |store| store.name.as_str())
                );
                root.reader.fault(line, text);
            }
        }
    }

    fn check_named(&self, root: &Section<'_>, [section, name]: [&str; 2], stores: &[StoreName]) {
        let known = self.store_names();
        for store in stores.iter().filter(|store| !known.contains(&store.as_str())) {
            let line = root.line_at(&[section, name, "stores"]).unwrap_or_default();
            let cure = match known.is_empty() {
                true => "leave it out: there is one store, [store]".to_owned(),
                false => suggestion(store.as_str(), &known),
            };
            root.reader.fault(line, format!("{section}.{name}.stores: there is no [stores.{store}]; {cure}"));
        }
    }
}
